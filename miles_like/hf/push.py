"""Uploads of a Hugging Face directory to the hub."""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def check_push(repo: str) -> None:
    """Checks the name of a repository, and the token by the hub's `whoami`: before an export, which can take hours.
    Raises ValueError for what is no name, without a token, for one that the hub rejects, and without an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # re-exported
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # likewise

    try:
        validate_repo_id(repo)
        HfApi().whoami()
    except HFValidationError:
        raise ValueError(f"--push {repo}: expected the name of a hub repository, OWNER/NAME") from None
    except (HTTPError, OSError) as e:
        raise ValueError(
            f"--push {repo}: {_first_lines(e)}: provide a token with write permission with `hf auth login` or HF_TOKEN"
        ) from None


def push(directory: Path, repo: str, message: str) -> str:
    """Upload all files as one commit and return its URL. A repository that does not exist is created, private. Weights
    that an earlier commit left there under other names are deleted: loaders would prefer them.

    Raises ValueError when the hub refuses or the connection breaks; `directory` stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # re-exported

    api = HfApi()
    try:
        found = api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=found.repo_id, folder_path=directory, commit_message=message, delete_patterns=_WEIGHTS
        )
    except (HTTPError, OSError, RuntimeError) as e:
        raise ValueError(
            f"could not upload {directory} to {repo}: {_first_lines(e)}: the files are kept, upload them with "
            f"`hf upload {repo} {directory}`"
        ) from None
    return str(commit.commit_url)


def _first_lines(error: Exception) -> str:
    """The cause where the client wraps one, without its request ids and links."""
    found: BaseException = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    lines = [line.strip() for line in str(found).splitlines() if line.strip()] or [type(found).__name__]
    return " ".join(lines[:2]).rstrip(" .:")
