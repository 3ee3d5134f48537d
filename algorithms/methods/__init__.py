"""The methods, each of which reads like its paper: one file a paper; `registry` names them.

May import core and the barrier's questions; no method imports another one's file.
"""
