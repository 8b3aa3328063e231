"""Meshes and the rules that map logical axes to them."""

from jaxstack.sharding.mesh import AXES, make_mesh
from jaxstack.sharding.rules import Rules

__all__ = ["AXES", "Rules", "make_mesh"]
