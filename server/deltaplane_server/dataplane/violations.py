"""Collects everything that is wrong with a request, so that one answer names it all."""

from collections.abc import Iterable, Iterator

from deltaplane_controlplane.errors import FieldViolation, InvalidArgumentError

_MAX_IN_MESSAGE = 3


class Violations:
    """The field violations of one request."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[FieldViolation]:
        return iter(self._found)

    def add(self, field: str, description: str) -> None:
        """Notes that `field` is out of bounds; `description` says value, limit and how to mend it."""
        self._found.append(FieldViolation(field, description))

    def extend(self, violations: Iterable[FieldViolation]) -> None:
        """Notes what another check has found."""
        self._found.extend(violations)

    def raise_if_any(self) -> None:
        """Errors: InvalidArgumentError with all violations."""
        if not self._found:
            return
        shown = [f"{violation.field}: {violation.description}" for violation in self._found[:_MAX_IN_MESSAGE]]
        if (hidden := len(self._found) - len(shown)) > 0:
            shown.append(f"and {hidden} more (see the BadRequest details)")
        raise InvalidArgumentError("; ".join(shown), violations=self._found)


def shown(text: str, limit: int = 40) -> str:
    """A client's text as a message may repeat it: quoted, escaped and short."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"
