"""Models that leave the house: packed to be shipped, exported for others, and listed.

The folder beside these modules, `afm-135m`, is what `coa model pack` wrote for the model that this
package carries. `models/references.py` finds it; nothing here is needed to run it.
"""
