import "../base/digits.plt"

data {
  source     = mnist("none", transform = python("transforms:small")) #! W0309 E0336
  validation = 0
}
