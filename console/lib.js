// The one place that names the vendored library: vendor/README.md says where it comes from.
export {
  html,
  render,
  createContext,
  useContext,
  useState,
  useEffect,
  useRef,
  useMemo,
} from "./vendor/htm-preact-standalone.js";
