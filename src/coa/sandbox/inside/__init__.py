"""What runs behind the walls: standard library only, importable without `coa` (relative imports).

`zygote` waits for jobs and forks a child for each, `confine` takes the child's rights away, and
`program` runs what was asked for.
"""

from __future__ import annotations
