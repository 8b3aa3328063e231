"""Pipeline parallelism: schedules as tables (`schedule`)."""

from jaxstack.pipeline.schedule import Schedule, gpipe, interleaved_one_f_one_b, one_f_one_b

__all__ = ["Schedule", "gpipe", "interleaved_one_f_one_b", "one_f_one_b"]
