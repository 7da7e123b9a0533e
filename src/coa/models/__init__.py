"""Models as files: references to them, their folders, adapters and tokenizers, and exports.

The folder beside these modules, `afm-135m`, is what `coa model pack` wrote for the model that this
package carries. `models/references.py` finds it; nothing here is needed to run it.
"""
