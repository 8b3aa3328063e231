"""Pipeline parallelism: schedule tables (`schedule`), programs of a model (`program`), their executor (`execute`)."""

from jaxstack.kernels.taps import product
from jaxstack.pipeline.execute import PipelineFns, Sums, execute
from jaxstack.pipeline.program import Program, Stages, resolve
from jaxstack.pipeline.reference import forward
from jaxstack.pipeline.schedule import Schedule, ScheduleError, gpipe, interleaved_one_f_one_b, one_f_one_b
from jaxstack.pipeline.transform import value_and_grad
from jaxstack.pipeline.zero_bubble import zb1, zb_h1

__all__ = [
    "PipelineFns",
    "Program",
    "Schedule",
    "ScheduleError",
    "Stages",
    "Sums",
    "execute",
    "forward",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "product",
    "resolve",
    "value_and_grad",
    "zb1",
    "zb_h1",
]
