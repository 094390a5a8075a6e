import "../base/digits.plt"

data {
  source     = mnist("none", transform = python("transforms:normalizing")) #! W0309 W0335
  validation = 0
}
