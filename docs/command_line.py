"""The commands, for the page that documents them."""

from mpitrain.cli.main import commands as make_commands

commands = make_commands()
