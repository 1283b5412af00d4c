"""Moves KV rows between two engines: prefill/decode disaggregation without the engines.

``interface`` is what an engine sees; ``factory`` makes a connector; ``connector`` is what all of them share.
"""
