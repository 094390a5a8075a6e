import "a.plt"

{
  batch = 64
}
