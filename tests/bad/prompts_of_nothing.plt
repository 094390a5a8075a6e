import "base/gpt.plt"

generate {
  every = 10 steps #! W0103
}
