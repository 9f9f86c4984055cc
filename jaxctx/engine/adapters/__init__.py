"""Adapters of one engine: what they are called, which slot each has, and how they come and go while steps run.

    table.py    names, slots and users; on the step thread
    sources.py  where the directories are that adapters may be loaded from
    loading.py  reads directories and replaces parameters, on a thread of its own

    ──load──▶ loading ──all parameters there──▶ named ──unload, or the name's next──▶ unnamed ──last user gone──▶ free

A context is bound to the content of its adapters, by their digests in the identity of its pages: never to a name or a
slot. It may switch to another one between two tokens.
"""
