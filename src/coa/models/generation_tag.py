"""The tag {% generation %} of chat templates: trainers read a mask off it, we show its body."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012  jinja2 wants a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
