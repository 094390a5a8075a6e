data {
  import "base.plt"
}
