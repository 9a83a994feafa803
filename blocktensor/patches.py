"""Changes that this package makes to objects of other libraries: all of them, in one table.

A library that has no hook in the right place gets a replacement of one of its functions. Importing
blocktensor replaces nothing. The module that needs a patch says how it is made
(``@SWAP_TENSORS.made_by``), and calls :meth:`Patch.apply` at the first use; patches that any FP8
weight needs are applied when the first FP8 tensor is made (:func:`apply_for_fp8`).

``BLOCKTENSOR_WITHOUT_PATCHES=swap_tensors,linear_adapters`` leaves patches out.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakSet

from .text_table import Table

VARIABLE = "BLOCKTENSOR_WITHOUT_PATCHES"
"""Names patches to leave out, separated by commas."""

Kind = Literal["attribute", "attribute for a while", "class of instances", "global hook"]

_Made = TypeVar("_Made")
_ABSENT: Any = object()


@dataclass(eq=False)
class Patch:
    """A change to an object of another library.

    Attributes:
        name: names it in ``BLOCKTENSOR_WITHOUT_PATCHES``.
        target: ``module:attribute`` of what is replaced; for patches of instances, the class of
            these instances.
        kind: how the library is changed: an attribute is replaced, for good or within a ``with``;
            single instances get a derived class; or a function is added to global hooks.
        reason: what the library does without the patch.
        versions: the versions of the library that were seen to need the patch.
        when: the first use of blocktensor that applies the patch.
        test: the test that fails without it.
        without: what does not work if the patch is left out.
        for_fp8: if True, any FP8 weight needs it, and :func:`apply_for_fp8` applies it.
        is_required: if True, leaving the patch out raises at the first use; otherwise it warns.
    """

    name: str
    target: str
    kind: Kind
    reason: str
    versions: str
    when: str
    test: str
    without: str
    for_fp8: bool = False
    is_required: bool = False
    _make: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    _owner: Any = field(default=None, init=False, repr=False)
    _original: Any = field(default=None, init=False, repr=False)
    _derived: WeakSet[type] = field(default_factory=WeakSet, init=False, repr=False)
    _was_said: bool = field(default=False, init=False, repr=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    def made_by(self, make: _Made) -> _Made:
        """Register the function that makes the replacement. A decorator; it applies nothing.

        For a replacement that calls the original, see :meth:`around`.

        Args:
            make: ``make(original)`` returns the replacement. For patches of instances, it gets
                their class and returns a derived class; for a global hook, it gets nothing, and
                adds the hook.
        """
        self._make = make  # type: ignore[assignment]
        return make

    def around(self, ours: _Made) -> _Made:
        """Register a function that runs in place of the original. A decorator; it applies nothing.

        Args:
            ours: called as ``ours(original, *args, **kwargs)``.
        """

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return ours(original, *args, **kwargs)  # type: ignore[operator]

            return replacement

        self._make = make
        return ours

    @property
    def is_applied(self) -> bool:
        """Return True if the replacement is in place now, or if instances have a derived class."""
        return bool(self._derived) or self._is_on(self._find())

    def apply(self) -> bool:
        """Put the replacement in place, unless it is there already. Threads take turns.

        Returns:
            False, without a change, if the library is not imported yet, if no replacement is
            registered (its version needs no patch), or if the patch is left out.

        Raises:
            ValueError: ``BLOCKTENSOR_WITHOUT_PATCHES`` has a name that no patch has.
            NotImplementedError: the patch is left out, and required.

        Warns:
            UserWarning: the patch is left out.
        """
        with self._lock:
            owner = self._find()
            if self._is_on(owner):
                return True
            if owner is None or self._make is None or self._is_left_out():
                return False
            make: Any = self._make
            if self.kind == "global hook":
                make()
            else:
                self._original = getattr(owner, self._attribute, None)
                setattr(owner, self._attribute, make(self._original))
            self._owner = owner
            return True

    @contextmanager
    def during(self) -> Iterator[None]:
        """Apply the patch until the ``with`` ends. Threads take turns; nested ones are allowed.

        Raises:
            ValueError, NotImplementedError: as :meth:`apply`.

        Warns:
            UserWarning: as :meth:`apply`.
        """
        with self._lock:
            owner = self._find()
            if owner is None or self._is_left_out():
                yield
                return
            make: Any = self._make
            name = self._attribute
            before = getattr(owner, name, _ABSENT)
            setattr(owner, name, make(None if before is _ABSENT else before))
            try:
                yield
            finally:
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

    def give_class(self, instance: Any, *how: Any) -> None:
        """Change the class of one object of another library to a derived class, once.

        Args:
            instance: the object.
            how: further arguments for the function that makes the class.

        Raises:
            ValueError, NotImplementedError: as :meth:`apply`.

        Warns:
            UserWarning: as :meth:`apply`.
        """
        with self._lock:
            if isinstance(instance, tuple(self._derived)) or self._is_left_out():
                return
            make: Any = self._make
            derived = make(type(instance), *how)
            instance.__class__ = derived
            self._derived.add(derived)

    def state(self) -> str:
        """Return the state in this process: "applied", "left out" or "not applied" (yet)."""
        if self.is_applied:
            return "applied"
        return "left out" if self.name in _left_out() else "not applied"

    @property
    def _attribute(self) -> str:
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def _find(self) -> Any:
        """Return the module or class that has the attribute; None if it is not imported."""
        module, _, path = self.target.partition(":")
        owner: Any = sys.modules.get(module)
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name, None)
        return owner

    def _is_on(self, owner: Any) -> bool:
        """Return True if the replacement is in place in ``owner``, which may be a new import."""
        if owner is None or owner is not self._owner:
            return False
        is_hook = self.kind == "global hook"
        return is_hook or bool(getattr(owner, self._attribute, None) != self._original)

    def _is_left_out(self) -> bool:
        if self.name not in _left_out():
            return False
        text = f"{VARIABLE} leaves out {self.name!r}, which changes {self.target}: {self.without}"
        if self.is_required:
            raise NotImplementedError(f"{text}; remove {self.name!r} from {VARIABLE}")
        if not self._was_said:
            self._was_said = True
            warnings.warn(text, stacklevel=2)
        return True


def _left_out() -> frozenset[str]:
    return _names_in(os.environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=4)
def _names_in(text: str) -> frozenset[str]:
    """Return the names in the variable.

    Raises:
        ValueError: no patch has one of them.
    """
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    known = [patch.name for patch in PATCHES]
    if unknown := sorted(names.difference(known)):
        raise ValueError(f"{VARIABLE} names {unknown}: expected names among {known}")
    return names


# The table

SWAP_TENSORS = Patch(
    name="swap_tensors",
    target="torch.utils:swap_tensors",
    kind="attribute",
    reason="refuses to move a parameter that has weak references (of an EMA, of torch.export) or "
    "waits for its backward; register_parametrization makes an FP8 weight plain",
    versions="torch 2.11 to 2.13",
    when="the first FP8 tensor",
    test="tests/tensor/compat/test_swap_in.py::test_a_weight_with_weak_references_is_moved",
    without=".to(), .half() and the like raise for FP8 weights with weak references, their "
    "backwards that wait raise, and a parametrization makes a weight plain",
    for_fp8=True,
)

COMPILE_CACHE_KEY = Patch(
    name="compile_cache_key",
    target="torch.compiler.config:cache_key_tag",
    kind="attribute",
    reason="its caches of compiled graphs do not see this package's code",
    versions="torch 2.11 to 2.13",
    when="the first FP8 tensor, a matmul that is compiled, or a context of saved_tensors_in_fp8",
    test="tests/tensor/torch_internals/test_aot_autograd.py"
    "::test_torch_finds_compiled_graphs_by_the_key",
    without="after an update of blocktensor, torch.compile may run graphs of the version before: "
    "empty TORCHINDUCTOR_CACHE_DIR then",
    for_fp8=True,
)

PARAMETER_REGISTRATION = Patch(
    name="parameter_registration",
    target="torch.nn.modules.module:_global_parameter_registration_hooks",
    kind="global hook",
    reason="load_state_dict(assign=True) replaces an FP8 weight that a module was given later "
    "(b.weight = a.weight) by a plain one, and asks nobody",
    versions="torch 2.11 to 2.13",
    when="the first FP8 tensor",
    test="tests/test_patches.py::test_a_weight_that_is_assigned_brings_its_hooks",
    without="call blocktensor.convert again after b.weight = a.weight, or "
    "load_state_dict(assign=True) makes that weight plain",
    for_fp8=True,
)

PIPELINE_HALVES = Patch(
    name="pipeline_halves",
    target="torch.distributed.pipelining.stage:stage_backward_input",
    kind="attribute",
    reason="frees the graph that the half for weight gradients runs (pytorch#166577), and does "
    "not say that this half follows",
    versions="torch 2.11 to 2.13; the graph is freed before 2.13",
    when="a forward after pipelining was imported",
    test="tests/autograd/test_backward_in_halves.py"
    "::test_an_input_half_is_watched_once_and_no_longer_than_it_runs",
    without="zero-bubble schedules raise with torch before 2.13, and with later ones compute the "
    "gradient between the matmuls of gated MLPs twice",
)

FSDP_CHANGES = Patch(
    name="fsdp_changes",
    target="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    kind="class of instances",
    reason="does not say that a sharded parameter was changed or replaced",
    versions="torch 2.11 to 2.13",
    when="the first gather of an FP8 weight",
    test="tests/sharding/fsdp/test_fsdp_internals.py::test_a_change_between_forward_and_backward",
    without="FSDP2 cannot gather FP8 weights",
    is_required=True,
)

FSDP_FORWARDS = Patch(
    name="fsdp_forwards",
    target="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext",
    kind="class of instances",
    reason="does not say that a forward begins; a hook on modules would break compiled graphs",
    versions="torch 2.11 to 2.13",
    when="the first gather of an FP8 weight",
    test="tests/sharding/fsdp/test_fsdp_internals.py::test_a_change_between_forward_and_backward",
    without="FSDP2 cannot gather FP8 weights",
    is_required=True,
)

SAVE_PRETRAINED = Patch(
    name="save_pretrained",
    target="transformers.modeling_utils:PreTrainedModel.save_pretrained",
    kind="attribute",
    reason="cannot write frozen FP8 weights",
    versions="transformers 5.17 to 5.23",
    when="the first FP8 tensor, or a conversion, after transformers was imported",
    test="tests/conversion/test_pretrained_models.py::test_what_load_fp8_froze_is_saved",
    without="save_pretrained raises for models with frozen FP8 weights: use blocktensor.save_fp8",
    for_fp8=True,
)

RESIZE_TOKEN_EMBEDDINGS = Patch(
    name="resize_token_embeddings",
    target="transformers.modeling_utils:PreTrainedModel.resize_token_embeddings",
    kind="attribute",
    reason="makes a plain head in the place of one in FP8",
    versions="transformers 5.17 to 5.23",
    when="the first FP8 tensor, or a conversion, after transformers was imported",
    test="tests/conversion/test_pretrained_models.py::test_a_head_in_fp8_is_not_resized",
    without="resize_token_embeddings makes an FP8 head plain, without an error",
    for_fp8=True,
)

GIVEN_CONFIG = Patch(
    name="given_config",
    target="transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
    kind="attribute",
    reason="raises if the checkpoint's config.json names another method than the given config",
    versions="transformers 5.17 to 5.23",
    when="the first BlockwiseFP8Config",
    test="tests/integrations/transformers/test_transformers_loading.py",
    without="from_pretrained raises for checkpoints in FP8: use blocktensor.load_fp8",
)

FP8_LOADING = Patch(
    name="fp8_loading",
    target="transformers.modeling_utils:convert_and_load_state_dict_in_model",
    kind="attribute",
    reason="reads tensors by name and knows no scales; no hook of quantizers gets both the "
    "tensors and the rules by which they are renamed",
    versions="transformers 5.17 to 5.23",
    when="the first BlockwiseFP8Config",
    test="tests/integrations/transformers/test_transformers_loading.py",
    without="from_pretrained would load FP8 weights without their scales: load the model without "
    "BlockwiseFP8Config, and call blocktensor.convert",
    is_required=True,
)

PROGRESS_BAR = Patch(
    name="progress_bar",
    target="transformers.utils.logging:_tqdm_active",
    kind="attribute for a while",
    reason="shows a bar for a load without values; the public switch also stands for other "
    "libraries",
    versions="transformers 5.17 to 5.23",
    when="load_fp8 of a model of transformers",
    test="tests/checkpoint/test_transformers.py",
    without="load_fp8 shows progress bars of transformers",
)

EXPERT_ADAPTERS = Patch(
    name="expert_adapters",
    target="peft.tuners.lora.layer:ParamWrapper._activate_lora",
    kind="attribute",
    reason="computes W + B A of expert stacks in every forward, of the stack's size in high "
    "precision, and registers a parametrization for it",
    versions="peft 0.21",
    when="the first FP8 tensor, or a conversion, after peft was imported; or import "
    "blocktensor.integrations.peft",
    test="tests/end_to_end/test_peft_experts.py::test_nothing_of_the_size_of_a_stack_is_allocated",
    without="several active adapters of an FP8 stack are added to its high-precision values in "
    "every forward, and each forward registers a parametrization",
    for_fp8=True,
)

LINEAR_ADAPTERS = Patch(
    name="linear_adapters",
    target="peft.tuners.lora.layer:Linear.forward",
    kind="attribute",
    reason="converts inputs of adapters to fp32 and saves these, and adds each adapter in several "
    "passes over the output",
    versions="peft 0.21",
    when="the first FP8 tensor, or a conversion, after peft was imported; or import "
    "blocktensor.integrations.peft",
    test="tests/end_to_end/test_peft_linears.py::test_no_copy_of_an_input_is_saved",
    without="LoRA of linear layers takes more time and memory",
    for_fp8=True,
)

ADAPTERS_OF_CUT_EXPERTS = Patch(
    name="adapters_of_cut_experts",
    target="peft.tuners.lora.layer:ParamWrapper.update_layer",
    kind="attribute",
    reason="makes adapters of all experts on each rank, also of stacks whose experts are cut "
    "between ranks",
    versions="peft 0.21",
    when="the first FP8 tensor, or a conversion, after peft was imported; or import "
    "blocktensor.integrations.peft",
    test="tests/end_to_end/test_peft_cut_experts.py::test_ranks_train_the_adapters_of_their_experts",
    without="a forward with an adapter of FP8 experts that are cut between ranks raises",
    for_fp8=True,
)

ADAPTERS_OF_SHARDS = Patch(
    name="adapters_of_shards",
    target="peft.tuners.tuners_utils:BaseTuner.inject_adapter",
    kind="attribute",
    reason="makes adapters in a model that FSDP2 has sharded already, which FSDP2 neither shards "
    "nor reduces",
    versions="peft 0.21",
    when="the first FP8 tensor, or a conversion, after peft was imported; or import "
    "blocktensor.integrations.peft",
    test="tests/conversion/test_sharded_adapters.py",
    without="get_peft_model after fully_shard trains other adapters on each rank, without an error",
    for_fp8=True,
)

STRIDED_SHARDS = Patch(
    name="strided_shards",
    target="torch.distributed.tensor._redistribute:_gen_transform_infos_non_cached",
    kind="attribute",
    reason="cannot gather the parts that ranks have of the matrix B of an adapter of experts",
    versions="torch before 2.13",
    when="an adapter of experts that are cut between ranks",
    test="tests/end_to_end/test_peft_cut_experts.py"
    "::test_adapters_are_written_whole_and_read_by_cut_models",
    without="full_tensor() of such an adapter or its gradient raises",
)

TORCHTITAN_CONFIG = Patch(
    name="torchtitan_config",
    target="torchtitan.models.common.decoder:Decoder.Config",
    kind="class of instances",
    reason="builds a model from its config, of which the trainer has a reference already",
    versions="torchtitan 0.3",
    when="the conversion of a config",
    test="tests/integrations/torchtitan/test_converter.py",
    without="torchtitan cannot build models in FP8",
    is_required=True,
)

SET_TIMEOUT = Patch(
    name="set_timeout",
    target="torch.distributed:set_timeout",
    kind="attribute",
    reason="torchtitan 0.3.0 calls it after the first step; torch has it under a private name",
    versions="torch 2.13 with torchtitan 0.3.0",
    when="the conversion of a torchtitan config",
    test="tests/integrations/torchtitan/test_titan_overrides.py::test_torchtitan_can_set_timeouts",
    without="torchtitan's trainer raises after the first step",
)

PTXAS = Patch(
    name="ptxas",
    target="triton.knobs:runtime.add_stages_inspection_hook",
    kind="attribute for a while",
    reason="assembles for sm_90 with ptxas 12.8, which is 3-8% slower for 128x128 blocks; the "
    "hook sets triton.knobs.nvidia.ptxas for kernels of this package",
    versions="triton 3.6, 3.7",
    when="the compilation of a Hopper GEMM",
    test="tests/ops/runtime/triton_compat/test_compiler.py"
    "::test_the_pass_goes_behind_a_hook_that_is_there",
    without="GEMMs are up to 8% slower",
)

PATCHES = tuple(value for value in list(globals().values()) if isinstance(value, Patch))
"""All patches, in the order of the table."""

is_pending = True
"""True until the first FP8 tensor exists."""


def apply_for_fp8() -> None:
    """Apply all patches that FP8 weights need, of libraries that are imported by now.

    Raises, Warns:
        As :meth:`Patch.apply`.
    """
    global is_pending
    for patch in PATCHES:
        if patch.for_fp8:
            patch.apply()
    is_pending = False


def facts() -> list[dict[str, str]]:
    """Return all patches, with their texts and their state in this process."""
    names = ("name", "target", "kind", "reason", "versions", "when", "test", "without")
    return [
        {name: getattr(patch, name) for name in names} | {"state": patch.state()}
        for patch in PATCHES
    ]


def table() -> Table:
    """Return all patches with their state in this process."""
    rows = [(patch.name, patch.target, patch.kind, patch.state()) for patch in PATCHES]
    return Table(("patch", "changes", "of it", "state"), rows)
