"""The configuration of a run: frozen dataclasses, their defaults and their checks.

YAML files in `configs/` and dotted flags (`--model.num_layers=4`) fill these classes; `reading/parse.py` reads them.
Every default is declared here and nowhere else. JAX is not imported, so that `train.py --help` responds at once.

A check raises `ConfigError` with one line that names the key and its value, and then says what to do.
"""

from jaxstack.common.errors import ConfigError
from jaxstack.config.data import DataConfig, SourceConfig, WeightChange
from jaxstack.config.denoisers import DenoiserConfig
from jaxstack.config.expert_layers import ExpertLayers
from jaxstack.config.experts import MoEConfig
from jaxstack.config.model import (
    DeltaConfig,
    LatentConfig,
    LoraConfig,
    ModelConfig,
    PredictionConfig,
    RopeScaling,
    StateSpaceConfig,
)
from jaxstack.config.parallel import DistributedConfig, KernelsConfig, MeshConfig, PipelineConfig
from jaxstack.config.run import SEARCHED_KEYS, Config, flat, resolve, with_values
from jaxstack.config.training import (
    CheckpointConfig,
    DebugConfig,
    OptimConfig,
    ProfileConfig,
    RunConfig,
    SampleConfig,
    SpikeConfig,
    TrainConfig,
)

__all__ = [
    "SEARCHED_KEYS",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DebugConfig",
    "DeltaConfig",
    "DenoiserConfig",
    "DistributedConfig",
    "ExpertLayers",
    "KernelsConfig",
    "LatentConfig",
    "LoraConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "PipelineConfig",
    "PredictionConfig",
    "ProfileConfig",
    "RopeScaling",
    "RunConfig",
    "SampleConfig",
    "SourceConfig",
    "SpikeConfig",
    "StateSpaceConfig",
    "TrainConfig",
    "WeightChange",
    "flat",
    "resolve",
    "with_values",
]
