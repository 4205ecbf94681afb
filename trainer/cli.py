"""`longhaul COMMAND ...`: one command line over the modules of `trainer.command_table`."""

from __future__ import annotations

import sys
from difflib import get_close_matches

from trainer import __version__
from trainer.command_table import COMMANDS, resolve
from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS

COMPLETION = """\
_longhaul() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $word == --* ]]; then
        COMPREPLY=($(compgen -W "{options}" -- "$word"))
    elif [[ $COMP_CWORD == 1 ]]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    elif [[ $before == --config ]]; then
        COMPREPLY=($(compgen -f -X '!*.toml' -- "$word") $(compgen -W "{configurations}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _longhaul longhaul
"""
SHELLS = {"bash": COMPLETION, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + COMPLETION}


def main() -> None:
    # Commands of two words first, since `evaluate` alone is a group and no command.
    for length in (2, 1):
        command = " ".join(sys.argv[1 : 1 + length])
        if command in COMMANDS:
            # Messages name commands as this process was started: `typed` reads argv[0].
            sys.argv = [f"longhaul {command}", *sys.argv[1 + length :]]
            # Imported late: `--version` and the list of commands need no configuration.
            from trainer.commands import run_command

            sys.exit(run_command(sys.argv[1:], resolve(COMMANDS[command].parser)()))
    words = sys.argv[1:]
    if words == ["--version"]:
        sys.stdout.write(f"longhaul {__version__}\n")
    elif words[:1] == ["completion"] and words[1:] and words[1] in SHELLS:
        sys.stdout.write(completion(words[1]))
    else:
        sys.exit(show_usage(words))


def completion(shell: str) -> str:
    """A script that completes commands, options and configurations."""
    from trainer.config.parse import CONFIG_DIR, all_sections, section_keys

    keys = [f"--{section}.{key}" for section in all_sections() for key in section_keys(section)]
    return SHELLS[shell].format(
        commands=" ".join(dict.fromkeys(command.partition(" ")[0] for command in COMMANDS)),
        options=" ".join(["--config", "--help", *keys]),
        configurations=" ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.toml"))),
    )


def show_usage(words: list[str]) -> int:
    """The commands, or those that begin with the first word; on standard error unless help was
    asked for.
    """
    of_group = [name for name in COMMANDS if words and name.startswith(f"{words[0]} ")]
    asks_for_help = words[-1:] in (["-h"], ["--help"]) and (len(words) == 1 or bool(of_group))
    error = "" if asks_for_help else f"error: {_unknown(words)}\n"
    lines = "".join(f"  {name:<20}  {COMMANDS[name].summary}\n" for name in of_group or COMMANDS)
    usage = "usage: longhaul COMMAND [option]... [--section.key VALUE]...\n\n"
    hint = "\nlonghaul COMMAND --help: its options; longhaul --version; longhaul completion bash|zsh\n"
    (sys.stdout if asks_for_help else sys.stderr).write(f"{error}{usage}{lines}{hint}")
    return EXIT_SUCCESS if asks_for_help else EXIT_BAD_CONFIG


def _unknown(words: list[str]) -> str:
    """The error for words that are no command, with the command that may be meant."""
    given = [word for word in words[:2] if not word.startswith("-")]
    names = dict.fromkeys(prefix for name in COMMANDS for prefix in (name, name.partition(" ")[0]))
    meant = [
        *get_close_matches(" ".join(given), names, n=1),
        *get_close_matches("".join(given[:1]), names, n=1),
    ]
    hint = f"; did you mean longhaul {meant[0]}?" if meant and meant[0] != " ".join(given) else ""
    return f"unknown command {' '.join(given) or '(none)'}{hint}"


if __name__ == "__main__":
    main()
