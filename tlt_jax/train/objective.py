"""The objective of a policy update: which loss, with which terms and limits; a static argument of its programs."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_jax.config.schema import CISPO, NONE, PPO, SEQUENCE


@dataclass(frozen=True)
class Objective:
    """The loss that the update minimizes.

    The policy gradient of `loss` (ppo, gspo, cispo, or the user's), with KL and entropy terms (GRPO, arXiv 2402.03300), or
    with `is_supervised` the negative log-likelihood of the answers. `clip_dual` 0: no dual clip. `importance`: none, token
    or sequence; `importance_cap` bounds its weights; `importance_mask` masks tokens or answers by their ratio, and
    `importance_veto` answers by that of one of their tokens (0: none). `kl_coef`: of the KL in the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 2.0
    temperature: float = 1.0
    is_supervised: bool = False
    loss: str = PPO
    clip_dual: float = 0.0
    importance: str = NONE
    importance_mask: float = 0.0
    importance_veto: float = 0.0

    @property
    def needs_answers(self) -> bool:
        """Whether the loss of a token depends on other tokens of its answer. Else it is computed some tokens at a time."""
        is_own = self.loss not in (PPO, CISPO)
        return is_own or self.importance == SEQUENCE or self.importance_veto > 0
