"""Token trees: their shapes, how a node's children are drawn, and the drafters that draft them."""
