"""LaMDA's shapes have as many parameters as their names say, and a tiny one of their kind
decodes.
"""

import pytest

from jaxspec import nets
from jaxspec.analysis import lamda, roofline
from jaxspec.weights import quantisation


@pytest.mark.parametrize(
    ("name", "billions"),
    [("lamda-137b", 137), ("lamda-8b", 8), ("lamda-2b", 2), ("lamda-100m", 0.1)],
)
def test_parameters_are_as_many_as_the_name_says(name, billions):
    """Within a tenth: the paper counts without embeddings."""
    config = roofline.shape_of(name)
    assert config == lamda.sizes()[name]
    network = nets.net_of(config)
    count = network.total(config, lambda piece: quantisation.count(network.shapes(piece)))
    assert count == pytest.approx(1e9 * billions, rel=0.1)
