"""Errors a user can cause. Each names the field, the value, the limit and the way out."""


class SpecserveError(Exception):
    """Base of every error this project raises on purpose."""


class RequestError(SpecserveError):
    """A request that cannot be served as asked: HTTP 4xx, shape `{"error": {...}}`.

    message: for a person, names the field, its value and the limit
    param:   the request field at fault, or None
    code:    a machine-readable word such as `context_length_exceeded`, or None
    status:  HTTP status, 400 unless said otherwise
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ConfigError(SpecserveError):
    """A server that cannot start as configured."""


class ModelError(SpecserveError):
    """A checkpoint that cannot be loaded: missing, damaged, or of an unsupported kind."""


class EngineError(SpecserveError):
    """The engine failed while this request was running."""


class ConstraintError(EngineError):
    """A request's constraint takes more work than it may: the request asked for too much."""
