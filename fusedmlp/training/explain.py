"""One line for what Hydra and OmegaConf refuse: what was given, and what is accepted, the closest first."""

import re
import traceback

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from fusedmlp.training.options import by_closeness


def explain(error: HydraException) -> str:
    """One message for an override that Hydra refuses: what was given, and the choices, the closest first."""
    if isinstance(error, OverrideParseException):
        reason = _first_line(error.message)
        # Without an equals sign the parser says no more than that.
        bare = reason.startswith("Error parsing override")
        reason = "expected KEY=VALUE" if bare else reason
        key, equals, value = str(error.override).partition("=")
        if equals and value and not bare and "=" not in value[:1] and "'" not in value and '"' not in value:
            lexed = reason.startswith("LexerNoViable")  # which names no more than the override
            written = f"a value with other signs than letters, digits and -_./ needs quotes: '{key}=\"{value}\"'"
            reason = written if lexed else f"{reason}; {written}"
        return f"cannot read the override {error.override!r}: {reason}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        if not group:
            return f"--config-name {option}: there is no such config; train.py's is train"
        choices = ", ".join(by_closeness(option, error.options or []))
        return f"{group}={option} is unknown; accepted: {choices}"
    cause = error.__cause__
    while isinstance(cause, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _unknown_key(str(cause.key), cause)
    if isinstance(cause, OmegaConfBaseException):
        return of_config(cause)
    return re.sub(r"\s*\n\s*", "; ", str(error).strip())


def raised_by_hydra(error: Exception) -> bool:
    *_, last = traceback.walk_tb(error.__traceback__)
    return str(last[0].f_globals.get("__name__", "")).partition(".")[0] in ("hydra", "omegaconf")


def of_hydra(message: str) -> str:
    if message.startswith("Config group override must be"):
        return "a config group takes the name of one of its options, as in model=mlp; see train.py --help"
    return _first_line(message)


def of_config(error: OmegaConfBaseException) -> str:
    if "Set[str]" in str(error):  # of Hydra's own interval(), which its sweeper does not take
        return "a sweep takes single values, as in KEY=1,2 or KEY=range(1,10); interval() has no first and next one"
    key = str(error.full_key or error.key or "")
    return f"{key}: {_first_line(str(error))}" if key else _first_line(str(error))


def _unknown_key(key: str, cause: OmegaConfBaseException) -> str:
    section = str(cause.full_key or key).rpartition(".")[0]
    assert isinstance(cause.parent_node, DictConfig)
    known = [str(name) for name in cause.parent_node if name != "hydra"]
    if not known:
        return f"{section}.{key}: no such key; {section} is a value, which has no keys"
    where = f"keys of {section}" if section else "keys and groups"
    return f"{section}{'.' if section else ''}{key}: no such key; {where}: {', '.join(by_closeness(key, known))}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "not understood"
