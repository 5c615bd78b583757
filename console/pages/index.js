// All pages: where, for which roles, and under which name in the navigation.
import { Overview, Live } from "./overview.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";
import { Models, Search } from "./models.js";
import { Rollouts } from "./rollouts.js";
import { Fleet, Scaling } from "./fleet.js";
import { Budgets, Costs, Usage } from "./usage.js";
import { Alerts, Incidents } from "./alerts.js";
import { Batches, Rules } from "./rules.js";
import { Auto, Tools } from "./policies.js";
import { Playground } from "./playground.js";
import { Access, Audit, Quality } from "./records.js";

const PLATFORM = ["viewer", "operator", "admin"];
const ALL = [...PLATFORM, "publisher"];
const USERS = [...ALL, "reader"];

export const PAGES = [
  { path: "overview", label: "Overview", show: Overview, roles: PLATFORM },
  { path: "live", label: "Live", show: Live, roles: PLATFORM },
  { path: "alerts", label: "Alerts", show: Alerts, roles: PLATFORM },
  { path: "incidents", label: "Incidents", show: Incidents, roles: PLATFORM },
  { path: "requests", label: "Requests", show: Requests, roles: USERS },
  { path: "tenants", label: "Tenants and keys", show: Tenants, roles: ALL },
  { path: "usage", label: "Usage", show: Usage, roles: USERS },
  { path: "costs", label: "Cost", show: Costs, roles: PLATFORM },
  { path: "budgets", label: "Budgets", show: Budgets, roles: USERS },
  { path: "models", label: "Models", show: Models, roles: ALL },
  { path: "playground", label: "Playground", show: Playground, roles: ALL },
  { path: "rollouts", label: "Rollouts", show: Rollouts, roles: ALL },
  { path: "batches", label: "Batches", show: Batches, roles: USERS },
  { path: "rules", label: "Rules on texts", show: Rules, roles: ["admin", "publisher"] },
  { path: "tools", label: "Server tools", show: Tools, roles: ALL },
  { path: "auto", label: "Automatic choice", show: Auto, roles: ALL },
  { path: "fleet", label: "Fleet", show: Fleet, roles: PLATFORM },
  { path: "scaling", label: "Scaling", show: Scaling, roles: PLATFORM },
  { path: "quality", label: "Quality", show: Quality, roles: PLATFORM },
  { path: "audit", label: "Audit", show: Audit, roles: PLATFORM },
  { path: "access", label: "Admin keys", show: Access, roles: PLATFORM },
  { path: "search", label: "", show: Search, roles: ALL },
];
