"""Pipeline parallelism: schedule tables (`schedule`), programs of a model (`program`), their executor (`execute`)."""

from jaxstack.pipeline.execute import PipelineFns, Sums, execute
from jaxstack.pipeline.program import Program, Stages, resolve
from jaxstack.pipeline.reference import forward
from jaxstack.pipeline.schedule import Schedule, ScheduleError, gpipe, interleaved_one_f_one_b, one_f_one_b
from jaxstack.pipeline.transform import value_and_grad

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
    "resolve",
    "value_and_grad",
]
