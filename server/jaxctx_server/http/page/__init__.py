"""The web page: one file of HTML without outside resources, served with a strict content security policy."""
