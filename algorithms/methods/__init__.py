"""One file a method, which reads like its paper; `registry` names them.

May import core and the barrier's questions; no method imports another one's file.
"""
