"""`llm-spec bench`: what speculation gives on a user's own prompts, by a clock outside the library.

`prompts` reads files, `contenders` opens what is compared, `rotation` orders it, `run` measures, `statistics` and
`summary` compute without I/O, the modules `report_*` write. Nothing outside the command line imports this package.
"""
