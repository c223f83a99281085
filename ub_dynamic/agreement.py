# SPDX-License-Identifier: Apache-2.0
"""What ``initialize_ub`` takes, checked and then compared between the ranks, before anything is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .backends.names import AUTO_EXCLUDES_POLICY, GEMM_METHODS, check_choices, registered_specs
from .backends.quantization import is_by_mode, mode_cfgs, mode_values, resolve_modes
from .errors import UBDynamicError, UBRankMismatchError, UBShapeError, UBUnsupportedError
from .groups import Group
from .manager import check_arguments
from .modes import CPU_MPI, gpu_mode
from .policy import ChooseOverlap, Policy, policy_of
from .policy_difference import differences, sent_runs
from .rules import combine, token_rule
from .shapes import CommSpec, Shape, parse_shape
from .tuning_table import TuningTable

PolicyArgument = Policy | TuningTable | ChooseOverlap | str | os.PathLike[str] | None


def check_group_arguments(tp_size: Any, tp_group: Any) -> None:
    """Raise for what no group can be made of; without a group there is nobody to tell."""
    if type(tp_size) is not int or tp_size < 1:
        raise UBShapeError(f"tp_size = {tp_size!r}: it is a positive int, the number of ranks of the TP group")
    known = isinstance(tp_group, torch.distributed.ProcessGroup) or hasattr(tp_group, "Get_size")
    if tp_group is not None and not known:
        raise UBUnsupportedError(
            f"tp_group = {tp_group!r}: it is an mpi4py communicator or a torch.distributed process group"
        )


def check_defaults(check: Any, auto: bool, policy: Any) -> None:
    """Raise for what no ``initialize_ub`` over TE takes, whatever its shape."""
    check_arguments(check, None)
    _check_kind(policy)
    if auto and policy is not None and policy != "always":
        raise UBUnsupportedError(AUTO_EXCLUDES_POLICY)


def agree(
    group: Group,
    shape: Any,
    tp_size: int,
    te: bool,
    options: Mapping[str, Any],
    policy: PolicyArgument,
    tp_group: Any = None,
) -> tuple[Shape, Policy | None]:
    """The capacity and the policy, after all ranks of the group have found the same arguments to be valid.

    A rank that refuses its own arguments tells the others, which would wait for it otherwise. ``tp_group``: what the
    caller gave where ``group`` is the one that TE makes.
    """
    refusal: BaseException | None = None
    chosen: Policy | None = None
    ranks_of_mpi = group.allgather(_rank_of_mpi(), "comparing numbers of ranks in initialize_ub") if te else []
    try:
        if te and tp_group is not None:
            _check_same_group(tp_group, group, ranks_of_mpi)
        check_arguments(options["check"], options["timeout"])
        if not isinstance(options["dtype"], torch.dtype):
            raise UBUnsupportedError(f"dtype = {options['dtype']!r}: it is a torch.dtype, as torch.bfloat16")
        capacity = parse_shape(shape, "capacity shape")
        specs = _configured(capacity, tp_size, te, options)
        chosen = _resolve_policy(policy, capacity, te, options["dtype"], tp_size, specs)
        if te and chosen is not None and options["auto"]:
            raise UBUnsupportedError(AUTO_EXCLUDES_POLICY)
    except BaseException as error:  # the policy's callable may end the process: the others must not wait for it
        refusal = error
    digest = None if chosen is None else chosen.digest()
    facts = {"shape": shape, **options, "policy": digest}
    mine = ", ".join(f"{name} = {value!r}" for name, value in facts.items() if value is not None)
    told = group.allgather(
        (mine, None if refusal is None else _text(refusal), digest), "comparing the arguments of initialize_ub"
    )
    if refusal is not None:
        raise refusal
    ranks = list(zip(group.members, told, strict=True))
    if refused := [f"rank {rank}: {text}" for rank, (_, text, _) in ranks if text is not None]:
        raise UBRankMismatchError(f"initialize_ub was refused on {'; '.join(refused)}")
    if len({facts for facts, _, _ in told}) > 1:
        text = "; ".join(f"rank {rank}: {facts}" for rank, (facts, _, _) in ranks)
        if len({digest for _, _, digest in told}) > 1:  # every rank sees that, and says more
            runs = group.allgather(sent_runs(chosen), "comparing the policies of initialize_ub")
            text += f". The policies differ: {differences(dict(zip(group.members, runs, strict=True)))}"
        raise UBRankMismatchError(f"the ranks call initialize_ub with different arguments: {text}")
    return capacity, chosen


def _rank_of_mpi() -> int | None:
    """This process's rank in MPI's world, which torch.distributed may number otherwise; None where nobody uses MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD.Get_rank() if mpi is not None and mpi.Is_initialized() else None


def _check_same_group(tp_group: Any, group: Group, ranks_of_mpi: Sequence[int | None]) -> None:
    """Raise unless ``tp_group`` has the ranks of ``group``, which TE makes: its ``initialize_ub`` takes none.

    Layers that were given another one would gather and scatter in the wrong group where they overlap.
    """
    if isinstance(tp_group, torch.distributed.ProcessGroup):
        kind = ""
        wanted: list[int | None] = [*group.members] if group.size > 1 else [torch.distributed.get_rank()]
        members = torch.distributed.get_process_group_ranks(tp_group)
    else:
        from mpi4py import MPI

        kind, wanted = " of MPI's world", list(ranks_of_mpi)
        members = tp_group.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group())
    if list(members) != wanted:
        raise UBUnsupportedError(
            f"tp_group has the ranks {list(members)}{kind}, but TE's UserBuffers take contiguous ranks of "
            f"torch.distributed as TP group, here {wanted}: number the ranks so, or use the host backend"
        )


def _check_kind(policy: Any) -> None:
    known = policy is None or isinstance(policy, str | os.PathLike | TuningTable | Policy) or callable(policy)
    if not known:
        raise UBUnsupportedError(
            f'policy = {policy!r}: it is None, "always", the path of a tuning table, a TuningTable, a Policy, or a '
            "callable (gemm, tokens) -> OverlapConfig | None"
        )


def _text(error: BaseException) -> str:
    """What is told to the other ranks; an error of the caller's own says its type too."""
    return str(error) if isinstance(error, UBDynamicError) else f"{type(error).__name__}: {error}"


def _configured(capacity: Shape, tp_size: int, te: bool, options: Mapping[str, Any]) -> tuple[CommSpec, ...]:
    """The communicators as ``ub_cfgs`` configures them, all modes checked; of several modes, those of the first."""
    ub_cfgs, modes = options["ub_cfgs"], (options.get("quantization_modes"), bool(options.get("use_fp8")))
    if is_by_mode(ub_cfgs) and not te:
        raise UBUnsupportedError("the host backend takes one ub_cfgs mapping; lists belong to quantization modes")
    if tp_size == 1:
        mode_cfgs(ub_cfgs, len(mode_values(*modes)))
        return ()
    with_cublasmp = bool(options.get("with_cublasmp"))
    first, *_ = resolve_modes(capacity, tp_size, options["dtype"], ub_cfgs, *modes, with_cublasmp)
    return () if with_cublasmp else first.specs  # a policy has nothing to choose there, as the backend will say


def _resolve_policy(
    policy: PolicyArgument, capacity: Shape, te: bool, dtype: torch.dtype, tp_size: int, specs: Sequence[CommSpec]
) -> Policy | None:
    """``policy`` as a :class:`Policy` that these communicators can follow, or None."""
    _check_kind(policy)
    if policy is None or policy == "always":
        return None
    if isinstance(policy, str | os.PathLike):
        policy = TuningTable.load(policy)
    if isinstance(policy, TuningTable):
        mode = gpu_mode(tp_size, shared=False) if torch.cuda.device_count() >= tp_size else None
        kind = str(dtype).removeprefix("torch.")
        policy.check_fits(tp=tp_size, hidden=capacity[1], dtype=kind, mode=mode if te else CPU_MPI)
        policy = policy.policy()
    if not isinstance(policy, Policy):
        rule = combine((token_rule(spec) for spec in specs if spec.method != "external"), capacity[0])
        policy = policy_of(policy, tuple(GEMM_METHODS), range(rule.minimum, rule.maximum + 1, rule.multiple))
    # Both raise for what they cannot follow.
    if specs:
        registered_specs(specs, policy.configurations())
    else:
        check_choices(policy.configurations())
    return policy
