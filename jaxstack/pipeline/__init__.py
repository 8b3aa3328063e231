"""Pipeline parallelism: schedule tables (`schedule`), programs of a model (`program`), their executor (`execute`)."""

from jaxstack.kernels.taps import product
from jaxstack.pipeline.any_shape import value_and_grad_of_stages
from jaxstack.pipeline.execute import execute
from jaxstack.pipeline.functions import PipelineFns, StackFns, Sums
from jaxstack.pipeline.measure import profile_functions
from jaxstack.pipeline.packing import PackedStages, pack_stages
from jaxstack.pipeline.program import Program
from jaxstack.pipeline.reference import forward
from jaxstack.pipeline.replicas import Replicas, ReplicatedCut, replicate
from jaxstack.pipeline.resolve import resolve
from jaxstack.pipeline.rotation import Rotation, RotationFns, Visit, groups_of, rotate
from jaxstack.pipeline.schedule import (
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb1,
    zb_h1,
)
from jaxstack.pipeline.stages import Stages
from jaxstack.pipeline.transform import value_and_grad

__all__ = [
    "PackedStages",
    "PipelineFns",
    "Program",
    "Replicas",
    "ReplicatedCut",
    "Rotation",
    "RotationFns",
    "Schedule",
    "ScheduleError",
    "StackFns",
    "Stages",
    "Sums",
    "Visit",
    "execute",
    "forward",
    "gpipe",
    "groups_of",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "pack_stages",
    "product",
    "profile_functions",
    "replicate",
    "resolve",
    "rotate",
    "value_and_grad",
    "value_and_grad_of_stages",
    "zb1",
    "zb_h1",
]
