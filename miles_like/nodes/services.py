"""One long-lived process on every node of the Ray cluster; a node that does not answer is reported beside the others.

`on_every_node` raises the first failure; here each node has an answer or the reason for which there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from miles_like.nodes.facts import NodeName, Unanswered
from miles_like.nodes.members import Node, living_nodes
from miles_like.nodes.waits import error_message, on_node


class _Service:
    """The actor; its object is made in the node's process."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._target = factory()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._target, method)(*arguments)


class NodeServices:
    """`factory()` on each of `nodes`, in their order; use as a context manager.

    names, racks: of the nodes. ray_gpus, object_store: GPUs and bytes of the object store that Ray has on each.
    departed: addresses of nodes that were in the cluster and left it; empty for chosen nodes, which a run does without.
    """

    def __init__(
        self, factory: Callable[[], Any], environment: Mapping[str, str], nodes: Sequence[Node] | None = None
    ) -> None:
        """environment: variables of the processes, which otherwise have those of the node's Ray. nodes: None: every
        living node."""
        everything = nodes is None
        nodes = living_nodes() if nodes is None else nodes
        every = ray.nodes()  # type: ignore[no-untyped-call]
        stores = {str(n["NodeID"]): int(n["Resources"].get("object_store_memory", 0)) for n in every}
        self.names = tuple(NodeName(host=n.host, address=n.address) for n in nodes)
        self.ray_gpus, self.racks = [n.gpus for n in nodes], [n.rack for n in nodes]
        self.object_store = [stores.get(n.id, 0) for n in nodes]
        here = {n.address for n in living_nodes()}
        gone = {str(n["NodeManagerAddress"]) for n in every if not n["Alive"]} if everything else set()
        self.departed = sorted(gone - here)
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Service)
        options = {"runtime_env": {"env_vars": dict(environment)}} if environment else {}
        self._actors = [actor.options(scheduling_strategy=on_node(n.id), **options).remote(factory) for n in nodes]
        self._gone: dict[int, Unanswered] = {}

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
        """Call `method` on the nodes of `arguments` at once: node number -> its result, or `Unanswered`. A node that
        exceeds the limit or whose process died is not called again."""
        refs = {self._actors[k].call.remote(method, given): k for k, given in arguments.items() if k not in self._gone}
        out: dict[int, Any] = {k: self._gone[k] for k in arguments if k in self._gone}
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref in ready:
            out[refs[ref]] = self._result(refs[ref], ref)
        for ref in late:
            why = Unanswered(f"it did not answer within {timeout_s:g} s")
            out[refs[ref]] = self._gone[refs[ref]] = why
        return out

    def _result(self, node: int, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as e:
            return Unanswered(error_message(e))
        except (ActorDiedError, RayActorError) as e:
            self._gone[node] = Unanswered(f"its process died ({' '.join(str(e).split())[:200]})")
            return self._gone[node]
        except RayError as e:
            return Unanswered(" ".join(str(e).split())[:300])

    def __enter__(self) -> NodeServices:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
