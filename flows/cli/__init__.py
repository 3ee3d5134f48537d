"""The command `epsilonflow`. It imports the flows; no flow imports it.

A file that is found in place of a package of ours ends the command by a sentence that names it.
"""

from epsilonflow.__main__ import refuse_shadowing

refuse_shadowing()
