"""What tests of more than one room share."""

import pytest

from jaxspec import accept, noise


@pytest.fixture
def wrong_rule():
    """The rejection rule with the mistake that is made most often: after a rejection it draws from p."""

    def rule(keys, position, draft, target):
        verdict = accept.rejection()(keys, position, draft, target)
        again = noise.at(keys, position, noise.Purpose.RESIDUAL)
        return verdict._replace(next_token=noise.categorical(again, target.log_probs[:, 0]))

    return rule
