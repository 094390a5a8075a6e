import "base/digits.plt"

devices {
  nodes = 1..4 #! W0808
}

checkpoint {
  every = 100 steps
}
