"""All groups of keys of a run, before keys of different groups are compared."""

from dataclasses import dataclass, field, replace

from jaxstack.config.data import DataConfig
from jaxstack.config.model import ModelConfig
from jaxstack.config.objective import Objective
from jaxstack.config.parallel import DistributedConfig, KernelsConfig, MeshConfig, PipelineConfig
from jaxstack.config.training import (
    CheckpointConfig,
    DebugConfig,
    DistillConfig,
    OptimConfig,
    PreferenceConfig,
    ProfileConfig,
    RLConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Groups:
    """The groups of keys. `Config` is a `Groups` that passed `jaxstack.config.checks`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def has_segments(self) -> bool:
        """Whether batches have segment ids, which attention stays within: documents, or padding apart from texts."""
        of_rows = self.data.packing or self.model.labels or self.learned_preference
        return bool(of_rows) or self.model.family == "encoder_decoder"

    @property
    def learned_preference(self) -> PreferenceConfig | None:
        """How the run learns from pairs of completions, or `None` if its data have none."""
        sources = {one.source for one in self.data.mixture or (self.data,)}
        return self.preference if "preferences" in sources else None

    @property
    def learned_rewards(self) -> RLConfig | None:
        """How the run learns from rewards of its own completions, or `None` if its data have no prompts."""
        sources = {one.source for one in self.data.mixture or (self.data,)}
        return self.rl if "prompts" in sources else None

    @property
    def read_data(self) -> DataConfig:
        """The data with as many rows in a batch as the loader reads: of prompts, those that a step may need."""
        rl = self.learned_rewards
        if rl is None:
            return self.data
        return replace(self.data, batch_size=self.data.batch_size // rl.group * rl.attempts)

    @property
    def aim(self) -> PreferenceConfig | RLConfig | None:
        """What the run learns in place of the likelihood of its data, if anything."""
        return self.learned_preference or self.learned_rewards

    @property
    def objective(self) -> Objective:
        """What the run learns, and what an evaluation measures."""
        return self.aim.objective if self.aim else self.model.objective

    @property
    def text_length(self) -> int:
        """Number of rows of a table of learned positions. A text beside a picture has as many as it has targets."""
        return self.data.target_length if self.model.reads_captions else self.data.seq_len

    @property
    def microbatch_size(self) -> int:
        """Number of sequences that are processed at a time, over all devices."""
        return self.data.batch_size // self.train.grad_accum
