"""Keys of the group `model.moe`: the mixture of experts in place of the MLP."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from jaxstack.common.counts import plural
from jaxstack.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds, require
from jaxstack.config.expert_layers import ExpertLayers


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: every block has several MLPs, and a router sends each token to a few of them."""

    num_experts: NonNegativeInt = 0
    """Experts per layer. 0 means a dense MLP."""
    top_k: PositiveInt = 2
    """Experts that each token is sent to. The routers `domain` and `timestep` always use one."""
    d_ff: PositiveInt | None = None
    """Hidden width of one expert. Null means `model.d_ff`."""
    router: Literal["softmax", "sigmoid", "domain", "timestep"] = "softmax"
    """How experts are chosen. `softmax`: the top_k most probable ones (Mixtral, Qwen3). `sigmoid`: DeepSeek-V3's
    router, balanced by a bias instead of a loss. `domain`: expert i for domain i of the data. `timestep`: one expert
    for each of `num_experts` intervals of diffusion time."""
    normalize: bool = True
    """With router `softmax` or `sigmoid`: divide the weights of a token's experts by their sum. With `sigmoid`, the
    weight of a single expert is not divided."""
    num_groups: PositiveInt = 1
    """With router `softmax` or `sigmoid`: number of equal groups of neighbouring experts."""
    top_k_groups: PositiveInt = 1
    """With router `softmax` or `sigmoid`: number of groups from which a token's experts are chosen."""
    routed_scale: float = 1.0
    """With router `softmax` or `sigmoid`: factor on the weights of the chosen experts."""
    bias_update_rate: NonNegativeFloat = 1e-3
    """With router `sigmoid`: change per step of each expert's bias, towards a balanced load."""
    max_timestep: PositiveInt = 1000
    """With router `timestep` or family `diffusion`: number of timesteps of diffusion."""
    timestep_starts: tuple[int, ...] = ()
    """With router `timestep`: first timestep of each expert but the first one, such as `[125, 875]` for three experts.
    Empty means equal intervals."""
    layers: ExpertLayers = field(default_factory=ExpertLayers)
    shared_experts: NonNegativeInt = 0
    """Experts that process every token, in addition to the chosen ones."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by a learned gate, the sigmoid of a product with the token (Qwen 2)."""
    bias: bool = False
    """Add a bias to the router and to each projection of an expert (gpt-oss). It needs router `softmax` or
    `sigmoid`."""
    swiglu_limit: PositiveFloat | None = None
    """Clamp both projections into an expert's hidden layer to this limit: `up` on both sides, `gate` only from above.
    The hidden layer is then (up + 1) * gate * sigmoid(1.702 * gate), as in gpt-oss, whose limit is 7. Null means the
    usual SwiGLU."""
    capacity_factor: PositiveFloat | None = None
    """Maximum tokens per expert, as a multiple of the even share of each sequence. Excess tokens are dropped, lowest
    weight first. Null means dropless, which the routers `domain` and `timestep` require."""
    room: PositiveFloat | None = 1.25
    """With `mesh.expert` above 1 and no capacity: how many tokens a device can send to another one in one round of the
    exchange, as a multiple of even routing. More tokens take more rounds. Null means room for the worst case, so that
    one round is always enough."""
    aux_loss_weight: NonNegativeFloat = 0.01
    """With router `softmax`: weight of the sequence-wise load-balancing loss in the objective."""
    z_loss_weight: NonNegativeFloat = 0.0
    """With router `softmax` or `sigmoid`: weight of the router's z-loss in the objective."""

    def __post_init__(self) -> None:
        check_bounds("model.moe", self)
        require(
            self.num_experts > 0 or self.layers == ExpertLayers(),
            f"{self.layers.shown} says which layers have experts, but model.moe.num_experts=0. Set num_experts, or "
            f"leave model.moe.layers out.",
        )
        require(
            self.num_experts > 0 or not self.bias,
            "model.moe.bias=true is for experts, but model.moe.num_experts=0. Set num_experts, or use bias=false.",
        )
        require(
            self.num_experts > 0 or self.swiglu_limit is None,
            f"model.moe.swiglu_limit={self.swiglu_limit} is for experts, but model.moe.num_experts=0. Set num_experts, "
            f"or leave swiglu_limit null.",
        )
        if self.num_experts:
            self._check_router()
            self._check_groups()
            self._check_timesteps()

    def _check_router(self) -> None:
        learned = self.router in ("softmax", "sigmoid")
        require(
            not learned or self.top_k <= self.num_experts,
            f"model.moe.top_k={self.top_k} is more than model.moe.num_experts={self.num_experts}. Lower top_k.",
        )
        require(
            not (self.router == "softmax" and self.normalize and self.top_k == 1),
            "model.moe.top_k=1 with normalize=true makes every weight 1, so the router cannot learn. "
            "Use normalize=false, or top_k=2.",
        )
        require(
            self.capacity_factor is None or learned,
            f"model.moe.capacity_factor={self.capacity_factor} limits the tokens of each sequence, but "
            f"model.moe.router={self.router} may send a whole sequence to one expert, which would drop most of them. "
            f"Use capacity_factor=null (dropless).",
        )

        require(
            self.capacity_factor is None or self.room == MoEConfig.room,
            f"model.moe.room={self.room} is for rounds, which model.moe.capacity_factor={self.capacity_factor} has "
            f"none of. Use capacity_factor=null, or leave room out.",
        )
        require(
            learned or not (self.bias or self.swiglu_limit),
            f"model.moe.router={self.router} makes each expert a dense model, whose MLP has neither model.moe.bias nor "
            f"swiglu_limit. Use router=softmax or sigmoid, or leave both out.",
        )
        require(
            not self.shared_experts or not (self.bias or self.swiglu_limit),
            f"model.moe.shared_experts={self.shared_experts} have neither model.moe.bias nor swiglu_limit. Use "
            f"shared_experts=0, or leave both out.",
        )
        require(
            not self.shared_gate or self.shared_experts > 0,
            "model.moe.shared_gate=true needs experts that it acts on. Set model.moe.shared_experts.",
        )

    def _check_groups(self) -> None:
        require(
            self.num_experts % self.num_groups == 0,
            f"model.moe.num_groups={self.num_groups} does not divide model.moe.num_experts={self.num_experts}. "
            f"Use a divisor.",
        )
        require(
            self.top_k_groups <= self.num_groups,
            f"model.moe.top_k_groups={self.top_k_groups} is more than model.moe.num_groups={self.num_groups}. "
            f"Lower top_k_groups.",
        )
        require(
            self.router not in ("softmax", "sigmoid")
            or self.top_k_groups * (self.num_experts // self.num_groups) >= self.top_k,
            f"model.moe.top_k_groups={plural(self.top_k_groups, 'group')} of "
            f"{plural(self.num_experts // self.num_groups, 'expert')} cannot give "
            f"model.moe.top_k={self.top_k}. Raise top_k_groups, or lower top_k.",
        )

    def _check_timesteps(self) -> None:
        starts = self.timestep_starts
        bounds = (0, *self.timestep_starts, self.max_timestep)
        require(
            not starts or (self.router == "timestep" and len(starts) == self.num_experts - 1),
            f"model.moe.timestep_starts={list(starts)} divides time among {plural(len(starts) + 1, 'expert')}, but "
            f"model.moe.router={self.router} has {self.num_experts}. Use router=timestep with one start less than "
            f"experts, or leave it empty.",
        )
        require(
            not starts or all(one < other for one, other in pairwise(bounds)),
            f"model.moe.timestep_starts={list(starts)} does not rise from 1 to below max_timestep={self.max_timestep}. "
            f"Give the timesteps in their order.",
        )

    @property
    def choices(self) -> int:
        """Returns the number of experts that each token is sent to, without shared experts."""
        return self.top_k if self.router in ("softmax", "sigmoid") else 1
