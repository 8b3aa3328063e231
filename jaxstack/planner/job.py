"""A training step to plan: what it computes, and on which mesh. Commands and searches resolve it once."""

from dataclasses import dataclass, field, replace

from jaxstack.config import (
    Config,
    DataConfig,
    KernelsConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from jaxstack.models.context import Context
from jaxstack.training.state import Recipe, TrainState, abstract_state


@dataclass(frozen=True)
class Job:
    """A step of a run on a mesh. Neither the mesh nor its devices need exist.

    Attributes:
      cfg: the configuration, with the values that follow from the data.
      ctx: execution context for the mesh.
      known_state: the abstract state, if the caller has it. A search over meshes has the same one for many steps.
    """

    cfg: Config
    ctx: Context
    known_state: TrainState | None = field(default=None, compare=False, repr=False)

    @property
    def state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state."""
        return self.known_state or abstract_state(Recipe.of(self.cfg), self.ctx)

    @property
    def model(self) -> ModelConfig:
        """Returns the model."""
        return self.cfg.model

    @property
    def data(self) -> DataConfig:
        """Returns the shape of a batch."""
        return self.cfg.data

    @property
    def train(self) -> TrainConfig:
        """Returns what a step does."""
        return self.cfg.train

    @property
    def optim(self) -> OptimConfig:
        """Returns the optimizer."""
        return self.cfg.optim

    @property
    def pipeline(self) -> PipelineConfig:
        """Returns the keys of the pipeline. Its schedule is in the context."""
        return self.cfg.pipeline

    @property
    def kernels(self) -> KernelsConfig:
        """Returns which kernels are named."""
        return self.cfg.kernels

    @property
    def sample(self) -> SampleConfig:
        """Returns how texts are generated."""
        return self.cfg.sample

    def with_model(self, model: ModelConfig) -> "Job":
        """Returns the job with another model, such as one whose layers are all of a kind."""
        return replace(self, cfg=replace(self.cfg, model=model))

    def with_remat(self, policy: str) -> "Job":
        """Returns the job with another value of `train.remat`; `none` does not offload residuals."""
        offload = self.train.offload
        if policy == "none" and self.train.offloads_residuals:
            offload = "optimizer" if self.train.offloads_optimizer else "none"
        train = replace(self.train, remat=policy, offload=offload)  # type: ignore[arg-type]
        return replace(self, cfg=replace(self.cfg, train=train))

    def with_split(self, names: tuple[str, ...]) -> "Job":
        """Returns the job with these values of `pipeline.split`."""
        pipeline = replace(self.pipeline, split=names)
        return replace(self, cfg=replace(self.cfg, pipeline=pipeline))
