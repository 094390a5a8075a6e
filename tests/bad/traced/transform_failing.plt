import "../base/digits.plt"

data {
  source     = mnist("none", transform = python("transforms:failing")) #! W0309 E0802
  validation = 0
}
