"""What people read: a document (sections of text, tables, plots) made from a study or a run.

document      the value between a study and its forms      svg       plots, drawn here
text, html    a terminal's form, and a page that opens offline
measurements  every number with its interval: CSV, and comparing two files
acceptance, load, ab, ...   one document each              command   `specserve report`
"""
