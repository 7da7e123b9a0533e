"""Losses as pure functions of flat tensors, in float32, checked by hand and against TRL and verl.

One layout throughout: the tokens of all sequences one after another, with a tensor that says whose
each token is. Rows of an agent differ in length by a factor of ten and most of their tokens are not
trained, so nothing is padded, and a caller passes only what it computed logits for. Tokens of
weight 0 may be there and have no influence, whatever their values.

`tokens` is the layout and its normalisation, `likelihood` what one token's probabilities say,
`policy` the policy loss, `value` GAE and the value loss. docs/losses.md has the formulas.
"""

from coa.train.losses.likelihood import (
    entropy_of_logits,
    kl_estimate,
    kl_penalty,
    masked_cross_entropy,
    sampled_entropy,
    token_logprobs,
)
from coa.train.losses.policy import (
    Correction,
    PolicyLoss,
    PolicyMetrics,
    PolicyTokens,
    policy_loss,
    sampler_correction,
)
from coa.train.losses.tokens import Totals, shares
from coa.train.losses.value import Gae, ValueLoss, gae, last_token_rewards, value_loss, whiten

__all__ = [
    "Correction",
    "Gae",
    "PolicyLoss",
    "PolicyMetrics",
    "PolicyTokens",
    "Totals",
    "ValueLoss",
    "entropy_of_logits",
    "gae",
    "kl_estimate",
    "kl_penalty",
    "last_token_rewards",
    "masked_cross_entropy",
    "policy_loss",
    "sampled_entropy",
    "sampler_correction",
    "shares",
    "token_logprobs",
    "value_loss",
    "whiten",
]
