"""Pipeline parallelism: schedules as tables (`schedule`), ready to run (`program`), and what runs them (`execute`)."""

from jaxstack.pipeline.execute import PipelineFns, Sums, execute, forward
from jaxstack.pipeline.program import Program, Stages, resolve
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
