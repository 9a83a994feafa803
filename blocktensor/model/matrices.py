"""The parameters of two or more dimensions of a model: one for each module that holds one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .experts import Named, kind_of_experts, why_not_a_stack
from .linears import is_linear, kind_of
from .product_weights import label_of, weights_of, why_unconvertible


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter ``key`` of a module: a matrix or a stack of matrices.

    It holds the module, not the parameter: conversions count the references to that.

    Attributes:
        name: of the module, relative to the model.
        is_first: no module before it holds this parameter.
        unconvertible: why it is no weight that can be converted, of a linear or of experts; None if
            it is.
    """

    name: str
    key: str
    module: nn.Module
    is_first: bool
    unconvertible: str | None

    @property
    def parameter(self) -> Tensor:
        """The parameter as it is now."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def label(self) -> str:
        """The parameter's name; without ``.weight``, which leaves the module's."""
        return label_of(self.name, self.key)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; none while it is not initialized (nn.LazyLinear)."""
        return () if is_lazy(self.parameter) else tuple(self.parameter.shape)

    @property
    def elements(self) -> int:
        """Number of values; 0 if a module before it holds them, too."""
        return elements_of(self.parameter) if self.is_first else 0


def elements_of(parameter: Tensor) -> int:
    """Number of values; 0 of a parameter that is not initialized."""
    return 0 if is_lazy(parameter) else parameter.numel()


def matrices_of(model: nn.Module, named: Named) -> list[Matrix]:
    """All of a model, in the order of its modules; a tied parameter for each module.

    ``named``: stacks of experts that the caller of ``convert`` has named.
    """
    found = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if key != "bias" if is_lazy(parameter) else parameter.ndim > 1:
                why = _why_unconvertible(module, key, parameter, named)
                found.append(Matrix(name, key, module, id(parameter) not in seen, why))
                seen.add(id(parameter))
    return found


def _why_unconvertible(module: nn.Module, key: str, parameter: Tensor, named: Named) -> str | None:
    if key in weights_of(module, named):
        return why_unconvertible(module, key)
    if is_linear(module) and (why := why_unconvertible(module, "weight")) is not None:
        return why
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by it without calling a linear"
    if isinstance(module, _ConvNd):
        return "convolution"
    if isinstance(module, ParametrizationList):
        return "parametrized: a weight is computed from it"
    kind = kind_of(module)
    if is_lazy(parameter):
        return f"not the weight of a linear: in {kind}"
    if parameter.ndim > 3 and kind_of_experts(module) is not None:
        return why_not_a_stack(parameter)
    if parameter.ndim == 3 and len(parameter) > 1:
        return f"stack of matrices: in {kind}; experts={{...}} would name it"
    if kind_of_experts(module) is not None and "bias" in key:
        return "bias of experts"
    return f"not the weight of a linear: in {kind}"
