"""What a table of environment variables may set: a secret reaches no file and no message, a run owns what places it."""

import re
from pathlib import Path

import pytest

from miles_like.config.load import dump_config, load_config
from miles_like.variables import is_secret, read_variables
from quant.kernels.choice import VARIABLE
from tests.support.refusals import refuses

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"


SECRETS = re.findall(
    r"\w+",
    """
    WANDB_API_KEY hf_token AWS_SECRET_ACCESS AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID API_KEYS PGPASSWORD DB_PASSWORD
    GOOGLE_APPLICATION_CREDENTIALS APIKEY HFTOKEN MYSECRET SECRETS KEYFILE TOKEN KEY
    SGLANG_S3_SECRET_ACCESS_KEY SGLANG_S3_ACCESS_KEY_ID SGLANG_PRECISION_HF_TOKEN SGLANG_DIFFUSION_SLACK_TOKEN
    OAUTH_CLIENT_SECRET HUGGING_FACE_HUB_TOKEN HF_OIDC_ID_TOKEN ACTIONS_ID_TOKEN_REQUEST_TOKEN HF_TOKEN_PATH
    HF_TOKENS ACCESS_TOKENS MAXTOKENS Monkey NCCL_IB_PKEY_SECRET TOKENIZERS_API_KEY NUM_API_KEY_TOKENS MY_PKEYS
    MAX_TOKEN NEW_TOKEN TOKEN_RATIOS PERTOKEN
    """,
)  # the last two lines are ambiguous, or have a plain word beside a secret one
PLAIN = re.findall(
    r"\w+",
    """
    NCCL_DEBUG NVSHMEM_IB_GID_INDEX SGLANG_CACHE_DIR GLOO_SOCKET_IFNAME NCCL_IB_PKEY UCX_IB_PKEY nccl_ib_pkey
    TOKENIZERS_PARALLELISM SGLANG_PATCH_TOKENIZER SGLANG_DETOKENIZER_MAX_STATES SGLANG_BATCH_TOKENIZER_OUTPUTS
    SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_MAX_THINK_TOKENS
    SGLANG_DSV4_DECODER_TAIL_GRAPH_MIN_PREFILL_TOKENS SGLANG_USE_AITER_FP8_PER_TOKEN SGLANG_INIT_NEW_TOKEN_RATIO
    SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_SYNC_TOKEN_IDS_ACROSS_TP SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES
    """,
)


@pytest.mark.parametrize("name", SECRETS)
def test_what_may_be_a_secret_is_one(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_settings_whose_names_only_look_like_a_secret_s_are_plain(name: str) -> None:
    """Names of NCCL, UCX, tokenizers and SGLang 0.5.23."""
    assert not is_secret(name)
    assert read_variables("cluster.env", {name: 3}) == {name: "3"}


@pytest.mark.parametrize("table", ["cluster", "rollout"])
@pytest.mark.parametrize("value", ["abcd-1234", "77310", "7.5"])  # the last two are numbers of TOML
def test_a_secret_in_a_file_is_refused_and_not_repeated(table: str, value: str) -> None:
    with refuses(ValueError, f"{table}.env.HF_TOKEN", 'HF_TOKEN = ""', unrecorded="one sentence per value") as caught:
        load_config(TINY, [f"{table}.env.HF_TOKEN={value}"])
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "RAY_ADDRESS",
        "MILES_LIKE_SERVER_KEY",
        "PYTHONPATH",
        "VIRTUAL_ENV",
    ],
)
def test_a_variable_that_the_run_sets_is_refused(name: str) -> None:
    with refuses(ValueError, f"cluster.env.{name}"):
        load_config(TINY, [f"cluster.env.{name}=0"])


def test_the_choice_of_kernels_can_be_set() -> None:
    assert load_config(TINY, ["cluster.env.MILES_LIKE_TRITON=0"]).cluster.env == {VARIABLE: "0"}


@pytest.mark.parametrize("name", ["A-B", "1A", "", "A B", "A=B"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with refuses(ValueError, "rollout.env", repr(name)):
        read_variables("rollout.env", {name: "x"})


@pytest.mark.parametrize("value", [True, 1.5, ["a"], "a\0b"])
def test_what_is_no_text_is_refused(value: object) -> None:
    with refuses(ValueError, "cluster.env.NCCL_DEBUG"):
        read_variables("cluster.env", {"NCCL_DEBUG": value})


def test_tables_are_kept_in_the_resolved_configuration(tmp_path: Path) -> None:
    """A whole number is text; an override replaces one name and keeps the others; `false` drops an inherited name."""
    base, child = tmp_path / "base.toml", tmp_path / "child.toml"
    base.write_text(
        f'extends = "{TINY}"\n[cluster.env]\nNCCL_DEBUG = "INFO"\nNCCL_IB_QPS_PER_CONNECTION = 4\nWANDB_API_KEY = ""\n'
    )
    child.write_text(f'extends = "{base}"\n[cluster.env]\nNCCL_DEBUG = "WARN"\nNCCL_IB_QPS_PER_CONNECTION = false\n')
    config = load_config(child, ["rollout.env.SGLANG_X=1"])
    assert config.cluster.env == {"NCCL_DEBUG": "WARN", "WANDB_API_KEY": ""}
    assert config.rollout.env == {"SGLANG_X": "1"}
    (tmp_path / "resolved.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.toml") == config
