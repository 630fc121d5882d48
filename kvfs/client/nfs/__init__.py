"""How a mount is exported over NFS: nfsd's and Ganesha's configuration, and which of them runs."""
