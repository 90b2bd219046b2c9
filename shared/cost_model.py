"""The cost model under the name by which programs outside of this repository import it; it is `shared.costs.model`."""

from shared.costs.model import CostModel, StepShape

__all__ = ["CostModel", "StepShape"]
