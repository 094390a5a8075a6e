import "base/digits.plt"

devices {
  nodes = 3
  cpus  = 1
}

data {
  batch = 48
}

launch {
  with = ssh(hosts = ["host1", "host2"]) #! E0823
}
