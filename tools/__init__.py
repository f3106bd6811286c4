"""Set-up scripts and checks of this workspace; nothing here is shipped."""
