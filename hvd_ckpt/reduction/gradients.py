"""What stands in a parameter's ``grad`` at each moment, at all stages, and what code may do to it.

Each parameter is in one :class:`State` of this table:

=========  ========================================================  ========================================
state      ``grad``                                                  what its gradient of this step is
=========  ========================================================  ========================================
OWN        this rank's gradient, None, or what code has set          ``grad``, all of it; nothing is in flight
SENT       the placeholder                                           in flight, or in shards
ARRIVING   None, or the late part so far: autograd adds to it        in flight, and a late part
LATE       the placeholder                                           in flight, and the late part in ``part``
DROPPED    None, or what has been accumulated since                  ``grad``, all of it
REDUCED    the result, or what code has made of it since             ``grad``, if the ranks reduce again
USED       the placeholder, until ``grad`` is cleared                zeros if it was set to zero; else a step is an error
GROWING    None, of what was used: autograd is about to add to it    as in USED, also once something has been added
=========  ========================================================  ========================================

::

    OWN ------ it leaves ------> SENT -- an accumulation begins --> ARRIVING -- it ends --> LATE
                                  |  ^                               |   ^                    |  |
                                  |  +- torch.autograd.grad() ends --+   +- another begins ---+  |
                                  |                                                              |
                                  +------------ None is found in grad --> DROPPED <--------------+

    each state -- synchronize() --> REDUCED (stages 0 and 1) or SENT (stages 2 and 3); OWN or USED, if no rank has a gradient
    each state -- abandon() --> OWN, with None in grad
    REDUCED -- an accumulation --> OWN; with op=Sum on several ranks an error
    SENT -- step() --> USED -- an accumulation begins --> GROWING -- it ends --> OWN

So after ``backward()``, ``grad`` is the placeholder if the gradient has left, else this rank's own. After ``synchronize()`` it is
the result (stages 0 and 1) or the placeholder (stages 2 and 3), which stay after ``step()`` until gradients are cleared.

A unit that leaves without a gradient of a parameter leaves it OWN: one that comes later is a late part as a whole. Only gradients
in shards (stages 2 and 3) are USED or GROWING. There a late part leaves in the next round, so LATE becomes SENT, and what is in
shards stays SENT until a step has used it. What comes after a gradient was dropped leaves in a further round of the
synchronization, at all stages.

Code may read what is OWN or DROPPED and put another tensor or None in its place, on any rank. None in place of what has left drops
it, which is an error unless all ranks that have sent it do so. Using the values of a placeholder is an error at once, on that rank.
Two more acts are found later: a gradient in flight was replaced by a tensor, or one, in flight or not, was changed in place after
its last accumulation, so that only this rank's part is changed. What is found later is an error on every rank, in the
synchronization. What is REDUCED may be changed in place or set to None: a further synchronization compares what ranks have done, by
one small allreduce, and reduces again if they differ. Another tensor in its place is always reduced again.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any, ClassVar, TypeGuard

import torch

from hvd_ckpt.utils.torch_private import DisableTorchFunctionSubclass, execution_engine, tracing
from hvd_ckpt.utils.unmaterialized import CONVERSIONS, Absent

IN_FLIGHT = (
    "is being added up over the ranks: to clip, call hc.clip_grad_norm_(model.parameters(), max_norm); for anything else, call "
    "optimizer.synchronize() first, then step() within optimizer.skip_synchronize()"
)


class AbsentGradient(Absent, torch.Tensor):  # type: ignore[misc]
    """A placeholder of the right shape and without memory: it stands in ``p.grad`` where the values of a gradient are elsewhere.

    Without it, code between the backward pass and the step (clipping, norms for a log, a check for None) would find None, or values
    that the ranks are just adding up.

    Args:
        like: the parameter, or what else has its shape, dtype and device.
        where: has the gradient, and what to do instead of using this, for messages; by default :attr:`usual`.

    Attributes:
        usual: where a gradient of this class is.
    """

    absence = "in flight"
    usual = IN_FLIGHT
    _name: str
    _where: str

    def __new__(cls, like: torch.Tensor, name: str, where: str | None = None) -> AbsentGradient:
        with DisableTorchFunctionSubclass():
            nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
            made = nothing.expand(like.shape).as_subclass(cls)
        made._name, made._where = name, where or cls.usual
        return made

    @property
    def known_as(self) -> str:
        return self._name

    def missing(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the gradient of parameter '{self._name}' {self._where} ('{what}' needs its values)"
        )

    def _converted(self, func: Any, args: Any, kwargs: Any) -> AbsentGradient:
        """The placeholder in another dtype or on another device, as where the model is converted."""
        with DisableTorchFunctionSubclass():
            # Of one element, since the function may allocate memory for all.
            like = func(torch.empty((1,) * self.dim(), dtype=self.dtype, device=self.device), *args, **kwargs)
            return type(self)(like.expand(self.shape), self._name, self._where)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing() is None:
            name = getattr(func, "__name__", "")
            if (
                name in CONVERSIONS
                and isinstance(args[0], AbsentGradient)
                and (name != "type" or args[1:] or kwargs)
            ):
                return args[0]._converted(func, args[1:], kwargs or {})
            return super().__torch_function__(func, types, args, kwargs)
        with DisableTorchFunctionSubclass():  # torch.compile describes the gradients of parameters, too
            return func(*args, **(kwargs or {}))


def has_values(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there is a gradient and its values are here."""
    return gradient is not None and not isinstance(gradient, AbsentGradient)


State = enum.Enum("State", "OWN SENT ARRIVING LATE DROPPED REDUCED USED GROWING")  # see the table above
OWN, SENT, ARRIVING, LATE, DROPPED, REDUCED, USED, GROWING = State


class TrackedGradient:
    """What stands in the ``grad`` of one parameter. Its methods run once or twice for each gradient of a step, so they are short.

    Attributes:
        state: see the table of this module.
        part: the late part, where the placeholder stands in ``grad``.
        error: of an act that was found.
    """

    __slots__ = ("_placeholder", "_seen", "_version", "_view", "error", "name", "parameter", "part", "state")
    _kind: ClassVar[type[AbsentGradient]] = AbsentGradient  # of the placeholder

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter, self.name = parameter, name
        self._placeholder: AbsentGradient | None = None
        # What was in ``grad`` after the last accumulation; held weakly, so that a dropped one is freed. Its version, or that of
        # the view which is in flight.
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._view: torch.Tensor | None = None
        self.part: torch.Tensor | None = None
        self.error: RuntimeError | None = None
        self.state = OWN

    def begin_step(self, reduced: bool = False) -> None:
        """Nothing of it is in flight or has been accumulated; ``grad`` may be the result, the same on all ranks."""
        self.state = REDUCED if reduced else OWN
        self._seen = self._view = self.part = self.error = None
        if reduced:
            self.note()

    @property
    def is_away(self) -> bool:
        """Whether it is in flight, so that ``grad`` does not have it."""
        return self.state is SENT or self.state is LATE or self.state is ARRIVING

    @property
    def may_be_changed(self) -> bool:
        """Whether something may have been done to ``grad`` by hand; False in the usual case, which is found out fast."""
        gradient, view = self.parameter.grad, self._view
        if self.state is OWN:
            return gradient is not None and gradient._version != self._version
        if self.state is not SENT:
            return self.state is not REDUCED
        changed = view is not None and view._version != self._version
        return changed or gradient is not self._placeholder or self.error is not None

    @property
    def unsent(self) -> torch.Tensor | None:
        """What has been accumulated and has not left yet."""
        own = self.part if self.is_away else self.parameter.grad
        return own if has_values(own) else None

    @property
    def is_result(self) -> bool:
        """Whether ``grad`` is the result of a synchronization, unchanged since."""
        gradient = self.parameter.grad
        return self.state is REDUCED and gradient is not None and not self.is_new and not self.is_changed

    @property
    def is_new(self) -> bool:
        """Whether ``grad`` is another tensor than the one that was noted last."""
        return self._seen is None or self._seen() is not self.parameter.grad

    @property
    def is_changed(self) -> bool:
        """Whether what was noted last has been changed in place."""
        gradient = self.parameter.grad
        return gradient is not None and gradient._version != self._version and not self.is_new

    def note(self) -> None:
        """``grad`` is what the last accumulation has made of it, or the same values in another place."""
        gradient = self.parameter.grad
        if gradient is not None:
            self._seen, self._version = weakref.ref(gradient), gradient._version

    def send(self, view: torch.Tensor | None) -> None:
        """It leaves with its bucket, where it lies in ``view``, if code could have that."""
        self._hide()
        self._view, self._version = view, 0 if view is None else view._version
        self.state, self.part = SENT, None

    def _hide(self) -> None:
        """Puts the placeholder into ``grad``."""
        parameter, placeholder = self.parameter, self._placeholder
        if placeholder is not None:
            try:
                parameter.grad = placeholder
                return
            except (RuntimeError, TypeError):  # the model was converted since
                pass
        parameter.grad = self._placeholder = self._kind(parameter, self.name)

    def make_room(self) -> None:
        """A gradient is about to be accumulated, or asked for by ``torch.autograd.grad()``."""
        if self.state is SENT or self.state is LATE:
            self.look()
        if self.state is SENT or self.state is LATE:
            part = self.part
            if part is not None:  # the model may have been converted since
                self.part = part = part.to(self.parameter.device, self.parameter.dtype)
            self.parameter.grad, self.state = part, ARRIVING
            # ``torch.autograd.grad()`` accumulates nothing: then the placeholder comes back when it ends.
            execution_engine.queue_callback(self.settle)

    def arrived(self) -> None:
        """A gradient has been accumulated."""
        state = self.state
        if state is ARRIVING:
            self.part = self.parameter.grad
            self.settle()
        elif state is not SENT and state is not LATE:
            if state is not DROPPED:
                self.state = OWN
            self.note()

    def settle(self) -> None:
        """No accumulation is under way."""
        if self.state is ARRIVING:
            self.state = SENT if self.part is None else LATE
            if self.parameter.grad is self.part:
                self._hide()

    def follow(self) -> None:
        """What code has made of the result in place counts as the result."""
        gradient = self.parameter.grad
        if (
            self.state is REDUCED
            and gradient is not None
            and self._seen is not None
            and self._seen() is gradient
        ):
            self._version = gradient._version

    def drop(self) -> None:
        """What is in flight counts no more, if all ranks drop theirs."""
        self.state = DROPPED
        self._seen = self._view = self.part = None

    def look(self) -> RuntimeError | None:
        """Finds out what was done to ``grad`` by hand; returns the error, if that is one."""
        self.settle()  # also after a backward pass that has failed
        gradient, view = self.parameter.grad, self._view
        if not self.is_away:
            # Another tensor than the one that was noted is the user's, and taken as it is.
            if self.state is not REDUCED and self.is_changed:
                self.error = self.error or changed_in_place(self.name)
        elif gradient is None:
            self.drop()
        elif gradient is not self._placeholder:
            self.error = self.error or replaced(self.name, self._kind.usual)
        # Code has kept the view, or what shares its memory: no other way leads to what is in flight.
        elif view is not None and view._version != self._version:
            self.error = self.error or changed_in_place(self.name)
        return self.error


def summed_again(name: str) -> RuntimeError:
    """The error for a gradient that is a sum over the ranks and would be added up once more."""
    return RuntimeError(
        f"the gradient of parameter '{name}' is a sum over the ranks already, which op=Sum would multiply by their number; call "
        f"optimizer.zero_grad() after each step"
    )


def changed_in_place(name: str) -> RuntimeError:
    """The error for a gradient that was changed in place before it was reduced."""
    return RuntimeError(
        f"the gradient of parameter '{name}' was changed in place between backward() and synchronize(), so each rank has "
        f"changed its own part of it; to clip, call hc.clip_grad_norm_ in place of torch's; to drop gradients, set them to None; "
        f"for other changes call optimizer.synchronize() first, then step() within optimizer.skip_synchronize()"
    )


def replaced(name: str, where: str) -> RuntimeError:
    """The error for a gradient that was replaced after it had left; it is ``where``."""
    return RuntimeError(
        f"the gradient of parameter '{name}' was replaced between backward() and synchronize(), after it had left, and {where}"
    )
