"""Experiments over HTTP, each a plan (frozen settings), a run, and a result that `reports` shows.

arms        what is compared: a drafter, K and rule      cells    one cell: blocks of every arm
summary     acceptance of some requests, with intervals  command  `specserve study NAME`
acceptance  ab  lossless  capacity                       the studies
"""
