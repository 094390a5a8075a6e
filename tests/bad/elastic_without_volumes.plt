import "base/digits.plt"

devices {
  nodes = 1..2
}
checkpoint {
  every = 10 steps
}
launch {
  with = kubernetes(image = "registry/dslc:1") #! E0827
}
