"""The section ``parallel_config``: the number of agents that share a model, and the number of replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config.schema import own

MAX_RANKS = 256
"""Maximum number of agents of a server. The settings for agents, stages, replicas and nodes accept at most this number.
"""
LOCAL, NODES, RAY = "local", "nodes", "ray"
"""Values of ``executor``: agents on this machine, on nodes, or on nodes that Ray starts."""
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""Values of ``roles``: the steps that a replica computes."""
TCP, RDMA, ASCEND, MOONCAKE = "tcp", "rdma", "ascend", "mooncake"
"""``TCP`` and ``MOONCAKE`` are values of ``hand_over_transport``. All but ``MOONCAKE`` are values of
``mooncake_protocol``."""
MAX_SENT_BLOCKS = 1 << 14
"""Maximum number of blocks of one transfer between nodes. It limits the size of the message that asks a node for the
transfer.
"""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One entry of ``pools``: replicas that serve prompts up to a length."""

    name: str = own("", "Name of the pool.")
    replicas: int = own(1, "Number of replicas.", unit="replicas", low=1, high=MAX_RANKS)
    max_prompt_tokens: int | None = own(
        None, "Tokens of the longest prompt that the pool serves.", unit="tokens", low=1, null="any prompt"
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many agents share a model, and in which way. `docs/parallel.md` explains the choice.

    The number of agents is `tensor_parallel` x `pipeline_parallel` x `data_parallel`.
    """

    tensor_parallel: int = own(
        1,
        "Agents that compute each layer together. Heads, intermediate columns and vocabulary are divided.",
        unit="agents",
        low=1,
        high=MAX_RANKS,
    )
    pipeline_parallel: int = own(
        1, "Stages. Each stage has a part of the layers.", unit="stages", low=1, high=MAX_RANKS
    )
    data_parallel: int = own(
        1, "Replicas of the whole model. One of them serves a request.", unit="replicas", low=1, high=MAX_RANKS
    )
    sum_parts: int = own(
        1,
        "With `tensor_parallel` 1 on a CPU: add attention's output and the down projection in this number of "
        "parts. The text then equals that of `tensor_parallel` with this number of agents. Prefill takes up "
        "to a tenth longer.",
        unit="parts",
        low=1,
        high=64,
    )
    expert_parallel: bool = own(
        False,
        "For a model with experts: each of the `tensor_parallel` agents has whole experts instead of columns of every "
        "expert. A step reads fewer weights if its tokens choose few experts.",
    )
    routing: str = own(
        "prefix",
        "Choice of the replica. `prefix`: the replica with most of the prompt in its prefix cache, unless it "
        "has much more work than the least loaded one. `least_loaded`: the replica with the fewest tokens to "
        "compute. `round_robin`: one after the other, for comparison.",
        choices=("prefix", "least_loaded", "round_robin"),
    )
    pools: tuple[PoolConfig, ...] | None = own(
        None,
        "Pools of replicas by prompt length. Each is a mapping with `name`, `replicas` and `max_prompt_tokens` (null: "
        "any prompt). A prompt goes to the pool with the smallest limit that it does not exceed. `docs/parallel.md` "
        "has the details.",
        null="every replica serves prompts of any length",
    )

    roles: tuple[str, ...] | None = own(
        None,
        "The role of each replica, for separate prefill and decode. `prefill`: computes long prompts. `decode`: takes "
        "short prompts, and continues long ones. `both`: everything. `docs/separate_prefill.md` has the details.",
        null="`both` for every replica",
    )
    prefill_threshold: int | None = own(
        None,
        "With `roles`: uncached tokens from which a prompt goes to a `prefill` replica.",
        unit="tokens",
        low=1,
        null="learned from the measured times of prefills and hand-overs",
    )
    hand_over_blocks: int | None = own(
        None,
        "With `roles`: blocks of host memory for computed prompts that move between replicas. The memory is in "
        "`/dev/shm`.",
        unit="blocks",
        low=1,
        null="three times the blocks of the longest sequence",
    )
    hand_over_transport: str = own(
        TCP,
        "With `roles` and nodes: how nodes send handed blocks to each other. `tcp`: through connections with TLS. "
        "`mooncake`: through Mooncake's transfer engine, without protection. `docs/separate_prefill.md` has the "
        "details.",
        choices=(TCP, MOONCAKE),
    )
    mooncake_protocol: str = own(
        TCP,
        "With `hand_over_transport: mooncake`: what Mooncake uses between nodes. `rdma`: RDMA devices. `ascend`: the "
        "links of Ascends. `rdma` and `ascend` were not executed.",
        choices=(TCP, RDMA, ASCEND),
    )
    mooncake_device: str | None = own(
        None,
        "With `mooncake_protocol: rdma`: names of RDMA devices, with `,` between them. With `ascend`: number of the "
        "Ascend on each node.",
        null="all RDMA devices, or Ascend 0",
    )
    mooncake_unprotected: bool = own(
        False,
        "Confirms that only trusted machines reach the nodes. Mooncake has no keys and no encryption: everyone who "
        "reaches its ports can read and change handed blocks, which contain prompts.",
    )

    executor: str = own(
        LOCAL,
        "Where the agents are. `local`: on the machine of the server. `nodes`: on the machines of `nodes`, by default "
        "one replica on each. `ray`: on machines that Ray chooses. `docs/cluster.md` has the details.",
        choices=(LOCAL, NODES, RAY),
    )
    nodes: tuple[str, ...] | None = own(
        None,
        "With `executor: nodes`: the addresses of the nodes, each `HOST:PORT`. On each, `llm-serving cluster host` "
        "runs. At most `data_parallel` x `nodes_per_replica` nodes are used at a time. `dns:HOST:PORT` stands for all "
        "addresses that the name has in DNS, now and later.",
        null="none",
    )
    nodes_per_replica: int = own(
        1,
        "With `executor: nodes`: number of nodes that share one copy of the model, for a model that does not fit one "
        "node. Each of them has the same number of the agents of `tensor_parallel` x `pipeline_parallel`, in order of "
        "rank.",
        unit="nodes",
        low=1,
        high=MAX_RANKS,
    )
    idle_s: float | None = own(
        None,
        "With `executor: nodes`: time without requests after which the agents on the nodes end, so that the machines "
        "can be used otherwise. The server is then ready without a node, also at its start. Requests wait until a node "
        "has ready agents.",
        unit="seconds",
        low=0.1,
        high=31_536_000.0,
        null="the agents keep running, and the server starts only with a node",
    )
    cluster_key_file: str | None = own(
        None,
        "With `executor: nodes` or `ray`: the file with the cluster key, which the server and all nodes have. "
        "`llm-serving cluster key FILE` makes it. Only its owner may read it.",
        null="none",
    )
    ray_address: str = own(
        "auto",
        "With `executor: ray`: the address of the Ray cluster. `auto`: the cluster that runs on this machine.",
    )

    ray_cpus: int = own(
        1,
        "With `executor: ray`: CPUs that a replica reserves. With the cores of a machine, each machine gets one "
        "replica. On an Ascend, a replica also reserves an `NPU` for each agent.",
        unit="CPUs",
        low=1,
        high=4096,
    )

    @property
    def replica_roles(self) -> tuple[str, ...]:
        """The role of each replica, in order."""
        return self.roles or (BOTH,) * self.data_parallel

    @property
    def has_roles(self) -> bool:
        """True if a replica has another role than `both`."""
        return set(self.replica_roles) != {BOTH}

    @property
    def is_remote(self) -> bool:
        """True if the agents are on other machines."""
        return self.executor != LOCAL

    @property
    def agents_per_machine(self) -> int:
        """Number of agents on one machine. A node has the agents of one replica, or an equal part of them."""
        return (self.group_size if self.is_remote else self.world_size) // self.nodes_per_replica

    def place_on_machine(self, rank: int) -> int:
        """Returns the number of an agent among the agents of its machine."""
        return rank if self.nodes_per_replica == 1 else rank % self.agents_per_machine

    @property
    def ranks_of_machines(self) -> list[range]:
        """For each machine with agents of the first replica: the ranks of these agents."""
        count = self.agents_per_machine
        return [range(number * count, (number + 1) * count) for number in range(self.nodes_per_replica)]

    @property
    def as_summed(self) -> ParallelConfig:
        """These settings with ``sum_parts`` tensor-parallel agents instead of one agent that adds ``sum_parts`` parts.

        Both settings give the same results.
        """
        return replace(self, tensor_parallel=self.sum_parts, sum_parts=1)

    @property
    def group_size(self) -> int:
        """Number of agents of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def world_size(self) -> int:
        """Number of all agents."""
        return self.group_size * self.data_parallel
