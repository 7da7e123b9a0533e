"""python -m coa"""

from coa.cli import main

main()
