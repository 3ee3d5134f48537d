"""Before a run is charged: what it would cost, whether its settings make sense, consent, and a rehearsal of its card.

The stages check everything again; a preview saves the person the wait.
"""
